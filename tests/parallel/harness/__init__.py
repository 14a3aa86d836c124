"""Runs test functions on several ranks under one `horovodrun`.

* `matrix`: which tests run with how many ranks, over which transport, with which environment
* `launch`: one `horovodrun`; starts it, follows its ranks, and kills it where they hang
* `rank`: what every rank runs: pytest over the same file, reporting each outcome to a file of its own
* `fronts`: the front ends that the cases of `test_conformance_*` run on
* `script`, `models`, `arguments`, `merging`, `torch_training`, `keras_training`: what several files' tests share
* `world`: what a test function gets; a side channel between the ranks that is independent of Horovod
* `job`: launches of whole programs, for tests about how a job ends
"""
