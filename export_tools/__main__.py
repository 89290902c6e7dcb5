"""`python -m export_tools` is pshard-export."""

from export_tools.cli import main

if __name__ == "__main__":
    main(prog_name="pshard-export")
