"""Every parallelism as PyTorch ships it, one file each; course_lib/parallel has the same file names, from scratch."""
