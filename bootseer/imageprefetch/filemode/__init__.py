"""File mode: record which ranges of files a start reads, and read them ahead in the next start.

It works in any container of any runtime, without a mount and without privilege: the files stay
where the runtime put them, and only the kernel's page cache is filled in time.
"""
