"""What a start touched: recorded, kept, and fetched ahead in the next one."""
