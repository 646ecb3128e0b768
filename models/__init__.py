"""The study's networks and data: VGG13 on MNIST, and U-Net. Not part of the installed package.

Used by scripts/, from whose package ``common`` it takes errors and file writing.
"""
