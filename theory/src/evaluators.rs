//! Either evaluator, where the choice is made when the program runs.

use headflow_model::{Attention, Task, Watch};

use crate::moments::{Coordinates, Evaluator, Loss, Moments};
use crate::quadrature::Quadrature;
use crate::quasi_monte_carlo::QuasiMonteCarlo;

/// Population averages, sampled or exact.
#[derive(Debug, Clone)]
pub enum Averages {
    /// On quasi-random points: loss, gradient and the noise of SGD.
    Sampled(QuasiMonteCarlo),
    /// By quadrature: loss and gradient, to a tolerance.
    Exact(Quadrature),
}

impl Averages {
    /// The largest error that a quadrature made so far, by its own estimate, where it is above its tolerance.
    pub fn missed(&self) -> Option<f64> {
        match self {
            Self::Sampled(_) => None,
            Self::Exact(quadrature) => Some(quadrature.worst_error()).filter(|worst| *worst > quadrature.tolerance()),
        }
    }

    fn evaluator(&self) -> &dyn Evaluator {
        match self {
            Self::Sampled(points) => points,
            Self::Exact(quadrature) => quadrature,
        }
    }
}

impl Evaluator for Averages {
    fn task(&self) -> &Task {
        self.evaluator().task()
    }

    fn heads(&self) -> usize {
        self.evaluator().heads()
    }

    fn attention(&self) -> &Attention {
        self.evaluator().attention()
    }

    fn gives_noise(&self) -> bool {
        self.evaluator().gives_noise()
    }

    fn moments(&self, at: &Coordinates) -> Moments {
        self.evaluator().moments(at)
    }

    fn loss(&self, at: &Coordinates) -> Loss {
        self.evaluator().loss(at)
    }

    fn moments_watched(&self, at: &Coordinates, watch: &dyn Watch) -> Moments {
        self.evaluator().moments_watched(at, watch)
    }

    fn loss_watched(&self, at: &Coordinates, watch: &dyn Watch) -> Loss {
        self.evaluator().loss_watched(at, watch)
    }
}
