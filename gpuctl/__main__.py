"""Run the command line as ``python -m gpuctl``."""

from gpuctl.cli.app import main

if __name__ == "__main__":
    main()
