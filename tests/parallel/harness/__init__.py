"""Runs test functions on several ranks under one `horovodrun`.

* `matrix`: which tests run with how many ranks, over which transport, with which environment
* `launch`: one `horovodrun`; starts it, follows its ranks, and kills it where they hang
* `rank`: what every rank runs: pytest over the same file, reporting each outcome to a file of its own
* `compiler`: keeps PyTorch's compiler out of ranks that compile nothing
* `fronts`: the front ends that the cases of `test_conformance_*` run on
* `trainers`: the optimizers and tapes that those of `test_conformance_*optimizer` and `test_merging` run with
* `script`, `models`, `arguments`, `torch_training`, `keras_training`: what several files' tests share
* `world`: what a test function gets; a side channel between the ranks that is independent of Horovod
* `whole_jobs`: launches of whole programs, for tests about how a job ends
"""
