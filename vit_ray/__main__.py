"""`python -m vit_ray`: the command line."""

from vit_ray.commands.cli import main

if __name__ == "__main__":
    main()
