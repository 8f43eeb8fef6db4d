"""The demonstration (`make demo`): one real job started plainly and through bootseer, compared."""
