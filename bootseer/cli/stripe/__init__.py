"""`bootseer stripe`."""
