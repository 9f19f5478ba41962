"""Learning mixtures from samples of unequal quality: the theory of the paper as code.

X_i = Y_i + sigma_i g_i with Y_i from a k-atomic distribution, Gaussian g_i and a known noise level sigma_i per
sample (Definition "mog_heterogeneous"). `NoisyMixture` learns the atoms and their weights; the parts it is made
of, and the bounds, stand on their own. Docstrings quote the labels of the paper's source ("cov_conc").

    moments     denoised moments, the moment space (MOM-CHAR), Gauss quadrature: on a line
    subspace    the affine subspace of the atoms, in O(nd)
    search      median of means, partition, from marginals to atoms: the low-dimensional algorithm
    estimate    the high-dimensional algorithm; how many atoms there are
    likelihood  beyond the paper: the polish of atoms by maximum likelihood, and standard errors
    npmle       beyond the paper: the nonparametric maximum likelihood estimate, with a certificate
    model       `NoisyMixture`, with the interface of scikit-learn
    bounds      effective sample sizes, upper and lower bounds, and their conditions
    lemmas      the lemmas between the estimator and the bounds; hard pairs and packings
    distance    W1 on a line, in d dimensions, along directions
    samples     checking, drawing and reading samples
"""

from assay.mixture.model import ConditionWarning, NoisyMixture

__all__ = ["ConditionWarning", "NoisyMixture"]
