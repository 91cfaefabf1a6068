"""Import-only: the names that sglang's configuration modules take from torchvision when they are imported.

There is no build of torchvision for every build of torch. Nothing of it runs here: whoever calls into it gets an
AttributeError.
"""

__version__ = "0.28.0"
