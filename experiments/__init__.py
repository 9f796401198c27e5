"""One recipe per published table: `heedful reproduce NAME` writes `results/NAME.json` and prints the table."""
