"""What is read without an installation: a page that computes in the browser.

page.py    build/page: panels, planner and claims on floor 0, run by Pyodide; nothing is asked of another server
"""
