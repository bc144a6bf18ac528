"""Every parallelism from scratch, one file each; course_lib/native has the same file names, with what PyTorch ships."""
