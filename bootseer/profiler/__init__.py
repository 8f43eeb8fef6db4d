"""Events of starts from other sources than the job, and reports over one start or many."""
