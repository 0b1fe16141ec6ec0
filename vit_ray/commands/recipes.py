"""The list of shipped recipes."""

from rich.console import Console

from vit_ray.config.shipped_recipes import header_of, recipe_names, recipes_folder


def print_recipes() -> None:
    """Name, title, expected result and cost of every shipped recipe."""
    console = Console(highlight=False)
    for name in recipe_names():
        header = header_of(recipes_folder() / f"{name}.yaml")
        console.print(f"[bold]{name}[/bold]  {header.title}", soft_wrap=True)
        for what, text in (("expected", header.expected), ("cost", header.cost)):
            if text:
                console.print(f"    {what}: {text}", soft_wrap=True, markup=False)
    console.print(
        f"\nFiles are in {recipes_folder()}; `base: NAME` in your recipe starts from one.",
        soft_wrap=True,
    )
