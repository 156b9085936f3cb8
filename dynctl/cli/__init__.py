"""One file per command: parse, call one stage, print. Domain logic lives in the stages."""
