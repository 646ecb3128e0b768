"""The one exception that the scripts turn into a line on the terminal, and what goes into it."""


class UserError(Exception):
    """Something the user can mend; the message is one line: what was expected, what came."""


def first_line(error):
    """What an exception says, cut to one line; the name of its type where it says nothing.

    A line that ends in a colon only announces the next one, as in ``backend='inductor' raised:``.
    """
    first, *more = (str(error).strip() or type(error).__name__).splitlines()
    said = next((line.strip() for line in more if line.strip()), "")
    return f"{first} {said}" if first.endswith(":") and said else first
