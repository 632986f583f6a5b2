"""What each rank of a run will hold, in bytes, before anything is allocated."""
