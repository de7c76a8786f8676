"""`python -m perseus.cli`, the same as the console script `perseus`."""

from perseus.cli.entry import main

main()
