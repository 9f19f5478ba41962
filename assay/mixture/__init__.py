"""Learning mixtures from samples of unequal quality: the theory of the paper as code, and what it needs in use.

X_i = Y_i + noise_i with Y_i from a k-atomic distribution and Gaussian noise that is known for each sample.
`NoisyMixture` learns the atoms and their weights from samples in d dimensions; the parts it is made of, and the
bounds, stand on their own:

    moments     denoised moments, projection onto the moment space, Gauss quadrature
    noise       isotropic noise, noise along the axes, full covariances, missing values
    subspace    the affine subspace of the atoms, in O(nd)
    search      median of means, partition, from marginals to atoms
    likelihood  the polish of atoms by maximum likelihood, under any noise
    npmle       the nonparametric maximum likelihood estimate, with a certificate
    estimate    the estimator of the theorem, from these parts, and how many atoms there are
    deconvolve  components with covariances; posterior means and standard errors
    bounds      effective sample sizes, upper and lower bounds, hard pairs
    distance    W1 on a line, in d dimensions, along directions
    samples     drawing, reading and writing samples
    rates       error against the number of samples, what a noisy sample is worth: measured and drawn
"""

from assay.mixture.model import ConditionWarning, NoisyMixture

__all__ = ["ConditionWarning", "NoisyMixture"]
