"""OmniFold's unfolding under Horovod, on made events: one fit after another, each with early stopping and a schedule."""

import horovod.tensorflow.keras as hvd
import numpy as np
from omnifold import MLP, DataLoader, MultiFold

EVENTS, FEATURES = 256, 3

hvd.init()
random = np.random.default_rng(0)
nature, theory = random.standard_normal((EVENTS, FEATURES)), 0.5 + random.standard_normal((EVENTS, FEATURES))
noise = 0.1 * random.standard_normal((2, EVENTS, FEATURES))
part = {"rank": hvd.rank(), "size": hvd.size()}
measured = DataLoader(reco=nature + noise[0], normalize=True, **part)
simulated = DataLoader(reco=theory + noise[1], gen=theory, normalize=True, **part)
models = MLP(FEATURES, [8, 8]), MLP(FEATURES, [8, 8])
folder = f"weights.{hvd.rank()}"
unfold = MultiFold(
    "made", *models, measured, simulated, folder, niter=2, batch_size=16, epochs=4, lr=0.01, early_stop=2, **part
)
unfold.Unfold()
