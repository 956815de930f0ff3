//! x
pub mod flow;
pub mod moments;
pub mod quasi_monte_carlo;
