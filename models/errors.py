"""The one exception that the scripts turn into a line on the terminal."""


class StudyError(Exception):
    """Bad input that its user can mend; the message is one line: what was expected, what came."""
