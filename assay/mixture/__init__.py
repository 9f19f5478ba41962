"""Learning mixtures from samples of unequal quality: the theory of the paper as code.

X_i = Y_i + sigma_i g_i with Y_i from a k-atomic distribution and sigma_i known. `NoisyMixture` learns the
atoms and their weights from samples in d dimensions; the parts it is made of, and the bounds, stand on their
own:

    moments     denoised moments, projection onto the moment space, Gauss quadrature
    subspace    the affine subspace of the atoms, in O(nd)
    search      median of means, partition, from marginals to atoms
    likelihood  the polish by maximum likelihood
    bounds      effective sample sizes, upper and lower bounds, hard pairs
    distance    W1 on a line, in d dimensions, along directions
    samples     drawing, reading and writing samples
    rates, plot error against the number of samples, measured and drawn
"""

from assay.mixture.model import ConditionWarning, NoisyMixture

__all__ = ["ConditionWarning", "NoisyMixture"]
