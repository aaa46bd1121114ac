"""What a process needs around its service: time, cores, signals and an identity."""
