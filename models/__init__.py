"""The network and the data of the study: VGG13 on MNIST. Not part of the installed package."""
