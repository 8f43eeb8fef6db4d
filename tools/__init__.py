"""Programs for people who work on bootseer; nothing in the package imports them."""
