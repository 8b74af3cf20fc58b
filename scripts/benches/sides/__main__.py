"""python -m scripts.benches.sides NAME ARGUMENTS...: call the `main` of a side, with words converted as annotated."""

import asyncio
import inspect
import sys
from importlib import import_module

if __name__ == "__main__":
    name, *words = sys.argv[1:]
    main = import_module(f"scripts.benches.sides.{name}").main
    parameters = list(inspect.signature(main, eval_str=True).parameters.values())
    # All words that are left are those of the last parameter, if it takes any number.
    kinds = [parameter.annotation for parameter in parameters] + [parameters[-1].annotation] * len(words)
    result = main(*(kind(word) for kind, word in zip(kinds, words, strict=False)))
    if inspect.iscoroutine(result):
        asyncio.run(result)
