"""`python -m bench.report`: writes bench/RESULTS.md and the pictures."""

from bench.report.page import main

if __name__ == "__main__":
    main()
