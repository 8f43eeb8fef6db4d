"""`bootseer run` and `bootseer start` around real jobs."""
