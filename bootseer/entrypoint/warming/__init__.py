"""`bootseer warm`: a node made ready for a job before the job starts."""
