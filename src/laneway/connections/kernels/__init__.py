"""Kernels. Each backend computes what ``reference.py`` defines, through the same six functions.

Shapes: N tokens, n streams, C width, K = nC, m = n(n + 2). Streams x, y and their gradients are [N, n, C], a sub-layer's input h
and output f [N, C], contiguous. Parameters fn [m, K], base [m], scale [3]. ``maps`` [N, m] are finished: H_pre (n), H_post (n),
H_res ([out, in]). z [N, m] is the normalised projection, in the order of fn's rows (pre, post, res [in, out]), and r [N] the
norm's 1/√(mean x² + norm_eps): what the backward needs. ``cap`` 0 stands for none.

    pre             x → h, maps, z, r             ``carried`` [N, n], where given, mixes h in place of H_pre
    post            x, f, maps → y = H_res x + H_postᵀ f
    cross           post, then the next site's pre of y → y, h, maps, z, r
    post_backward   gy, x, f, maps → gf, gmaps    (H_pre's part is zero)
    pre_backward    gy, gh, gmaps, x, … → gx, gfn, gbase, gscale, gcarried
                    gy is the gradient of what post made of x: H_resᵀ is applied here, so that gx is written once
    cross_backward  the next site's pre_backward, then post_backward → g, gf, gmaps, gfn, gbase, gscale, gcarried

gy, gh and gmaps may be None, which stands for zeros. A row of a result does not depend on how many rows there are.
"""
