"""What is inside a widget: for tests of panels."""

import ipywidgets


def all_of(widget, kind) -> list:
    """Every widget of one kind inside another, in order."""
    found = [widget] if isinstance(widget, kind) else []
    return found + [inner for child in getattr(widget, "children", ()) for inner in all_of(child, kind)]


def control(widget, description: str):
    """The control with that description."""
    (found,) = [w for w in all_of(widget, ipywidgets.Widget) if getattr(w, "description", None) == description]
    return found


def texts(widget) -> str:
    return " | ".join(w.value for w in all_of(widget, ipywidgets.HTML))
