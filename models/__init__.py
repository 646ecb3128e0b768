"""The network and the data of the study: VGG13 on MNIST. Not part of the installed package.

Used by scripts/, from whose package ``common`` it takes errors and file writing.
"""
