"""`python -m heedful` is the command line."""

from heedful.cli import main

main()
