"""The graders of the exercises: one file a chapter, on the small framework of core.py."""
