"""One program builder per architecture."""
