"""What the operating system offers, under names of ours: nothing here knows what bootseer does."""
