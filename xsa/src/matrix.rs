//! `C = A B` or `C += A B` on strided views, by the crate `gemm`.

use gemm::{Parallelism, gemm};

use crate::real::Real;

/// A matrix inside a slice: entry `(i, j)` stands at `i row_stride + j column_stride`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<'a, T> {
    data: &'a [T],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a, T> Matrix<'a, T> {
    /// `rows x columns` numbers from the start of `data`, a row every `row_stride`.
    pub fn new(data: &'a [T], rows: usize, columns: usize, row_stride: usize) -> Self {
        let needed = if rows == 0 || columns == 0 { 0 } else { (rows - 1) * row_stride + columns };
        assert!(data.len() >= needed, "a view of {rows} x {columns} needs {needed} numbers, of {}", data.len());
        Self { data, rows, columns, row_stride, column_stride: 1 }
    }

    /// The transposed view.
    pub fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }
}

/// `into = factor a b`, or `into += factor a b` if `add`; `into` is dense, row by row. One thread, unless
/// `threads` says more; the bits do not depend on it.
pub(crate) fn multiply<T: Real>(
    into: &mut [T],
    factor: T,
    a: Matrix<'_, T>,
    b: Matrix<'_, T>,
    add: bool,
    threads: usize,
) {
    assert_eq!(a.columns, b.rows, "the inner sizes of a product");
    assert_eq!(into.len(), a.rows * b.columns, "the size of a product");
    if into.is_empty() {
        return;
    }
    let parallelism = if threads > 1 { Parallelism::Rayon(threads) } else { Parallelism::None };
    // SAFETY: `Matrix::new` and the asserts above make every entry that the strides reach lie inside its
    // slice; `into` is borrowed mutably, so it overlaps neither factor; T is f32 or f64.
    unsafe {
        gemm(
            a.rows,
            b.columns,
            a.columns,
            into.as_mut_ptr(),
            1,
            b.columns as isize,
            add,
            a.data.as_ptr(),
            a.column_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.column_stride as isize,
            b.row_stride as isize,
            T::one(),
            factor,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_sums() {
        let a: Vec<f64> = (0..5 * 9).map(|k| f64::from(k * 7 % 13) - 6.0).collect();
        let b: Vec<f64> = (0..4 * 6).map(|k| f64::from(k * 5 % 11) - 5.0).collect();
        // A is 5 x 6 with rows 9 apart; B is 6 x 4, held transposed.
        let (view_a, view_b) = (Matrix::new(&a, 5, 6, 9), Matrix::new(&b, 4, 6, 6).transposed());
        let mut product = vec![f64::NAN; 20];
        multiply(&mut product, 2.0, view_a, view_b, false, 1);
        let exact = |i: usize, j: usize| 2.0 * (0..6).map(|k| a[9 * i + k] * b[6 * j + k]).sum::<f64>();
        (0..20).for_each(|at| assert_eq!(product[at], exact(at / 4, at % 4)));
        multiply(&mut product, -1.0, view_a, view_b, true, 2);
        (0..20).for_each(|at| assert_eq!(product[at], exact(at / 4, at % 4) / 2.0));
    }

    #[test]
    #[should_panic(expected = "needs 15 numbers")]
    fn a_view_beyond_its_slice_is_refused() {
        let _ = Matrix::new(&[0.0; 14], 3, 5, 5);
    }
}
