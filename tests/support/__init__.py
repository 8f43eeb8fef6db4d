"""What tests share; `paths` says where things of the repository are."""
