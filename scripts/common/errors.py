"""The one exception that the scripts turn into a line on the terminal, and what goes into it."""


class UserError(Exception):
    """Something the user can mend; the message is one line: what was expected, what came."""


def first_line(error):
    """What an exception says, cut to one line; the name of its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
