"""mtplab: decoders that commit several tokens per forward pass, and the truth about them.

Importing this package imports neither mlx nor any other heavy dependency: the BLAS that mlx will use is chosen
by `mtplab.backend` before mlx is first imported.
"""

__version__ = "0.1.0"
