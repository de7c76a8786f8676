"""`python -m perseus.cli`, the same as the console script `perseus`."""

from perseus.cli.main import main

main()
