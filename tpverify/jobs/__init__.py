"""Entry points for `ray job submit`: they run on the cluster that the job belongs to."""
