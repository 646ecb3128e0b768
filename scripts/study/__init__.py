"""The VGG13 study: what it replaces, measures and reports."""
