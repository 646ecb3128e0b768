"""Networks and data: VGG13 on MNIST, and water clusters. Not in the installed package.

Used by scripts/ and examples/; imports nothing of theirs. files is for them, too.
"""
