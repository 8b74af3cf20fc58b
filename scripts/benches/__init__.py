"""The benches, a module for each; shared/ has the code that measures, and sides/ the processes that are measured."""
