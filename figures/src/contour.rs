//! Lines of equal height through a table of values, `v(x, y) = level`, by marching squares.

use std::collections::BTreeMap;

use crate::canvas::Point;

/// Two neighbouring nodes of the table, the lower number first.
type Edge = (usize, usize);

/// A node of the table: its number, its place and its value.
type Node = (usize, Point, f64);

/// The lines at `level` through `values`, of which `values[j][i]` belongs to `x[i]` and `y[j]`, with
/// linear interpolation along the edges of the cells between four neighbours. A closed line ends
/// where it begins.
///
/// A cell in which two lines could be joined in either way takes its centre to have the mean of its
/// corners. A cell that lacks one corner is the triangle of the others; with fewer it is left out.
pub fn contours(x: &[f64], y: &[f64], values: &[Vec<Option<f64>>], level: f64) -> Vec<Vec<Point>> {
    let node = |i: usize, j: usize| -> Option<Node> {
        let value = (*values.get(j)?.get(i)?)?;
        Some((j * x.len() + i, (*x.get(i)?, *y.get(j)?), value))
    };
    let mut segments = Vec::new();
    let mut places = BTreeMap::new();
    for j in 1..y.len() {
        for i in 1..x.len() {
            let corners: Vec<Node> =
                [(i - 1, j - 1), (i, j - 1), (i, j), (i - 1, j)].into_iter().filter_map(|(i, j)| node(i, j)).collect();
            if corners.len() > 2 {
                segments.extend(in_cell(&corners, level, &mut places));
            }
        }
    }
    joined(&segments)
        .into_iter()
        .map(|chain| chain.iter().filter_map(|edge| places.get(edge)).copied().collect())
        .collect()
}

/// The lines in one cell, each from edge to edge, of the ring of its corners.
fn in_cell(corners: &[Node], level: f64, places: &mut BTreeMap<Edge, Point>) -> Vec<(Edge, Edge)> {
    let above = |node: &Node| node.2 >= level;
    let next = corners.iter().cycle().skip(1);
    let crossed = corners.iter().zip(next).filter(|(a, b)| above(a) != above(b));
    let crossed: Vec<Edge> = crossed
        .map(|(a, b)| {
            // In one direction, so that both cells at an edge find the same point.
            let (a, b) = if a.0 < b.0 { (a, b) } else { (b, a) };
            let part = (level - a.2) / (b.2 - a.2);
            let between = |a: f64, b: f64| a + (b - a) * part;
            places.insert((a.0, b.0), (between(a.1.0, b.1.0), between(a.1.1, b.1.1)));
            (a.0, b.0)
        })
        .collect();
    match crossed[..] {
        [a, b] => vec![(a, b)],
        [a, b, c, d] => {
            let center = corners.iter().map(|node| node.2 / 4.0).sum::<f64>();
            // The corners that differ from the centre are cut off.
            if (center >= level) == above(&corners[0]) { vec![(a, b), (c, d)] } else { vec![(d, a), (b, c)] }
        }
        _ => Vec::new(),
    }
}

/// Chains of segments that meet at their ends, open ones first.
fn joined(segments: &[(Edge, Edge)]) -> Vec<Vec<Edge>> {
    let mut at: BTreeMap<Edge, Vec<usize>> = BTreeMap::new();
    for (number, &(a, b)) in segments.iter().enumerate() {
        at.entry(a).or_default().push(number);
        at.entry(b).or_default().push(number);
    }
    let ends = at.iter().filter(|(_, numbers)| numbers.len() == 1).map(|(&edge, numbers)| (numbers[0], edge));
    let all = segments.iter().enumerate().map(|(number, segment)| (number, segment.0));
    let mut used = vec![false; segments.len()];
    let mut chains = Vec::new();
    for (first, from) in ends.chain(all) {
        let (mut number, mut edge) = (first, from);
        let mut chain = vec![edge];
        while !used[number] {
            used[number] = true;
            let (a, b) = segments[number];
            edge = if edge == a { b } else { a };
            chain.push(edge);
            let onward = at.get(&edge).and_then(|numbers| numbers.iter().find(|&&n| !used[n]));
            number = onward.copied().unwrap_or(number);
        }
        if chain.len() > 1 {
            chains.push(chain);
        }
    }
    chains
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(x: &[f64], y: &[f64], value: impl Fn(f64, f64) -> Option<f64>) -> Vec<Vec<Option<f64>>> {
        y.iter().map(|&y| x.iter().map(|&x| value(x, y)).collect()).collect()
    }

    fn axis(low: f64, high: f64, count: usize) -> Vec<f64> {
        (0..count).map(|k| low + (high - low) * k as f64 / (count - 1) as f64).collect()
    }

    #[test]
    fn a_circle_is_one_closed_line_within_a_cell_of_it() {
        let (x, y) = (axis(-2.0, 2.0, 41), axis(-3.0, 3.0, 31));
        let values = table(&x, &y, |x, y| Some(x.hypot(y)));
        let lines = contours(&x, &y, &values, 1.3);
        assert_eq!(lines.len(), 1);
        let line = &lines[0];
        assert_eq!(line.first(), line.last());
        assert!(line.len() > 40);
        for point in line {
            assert!((point.0.hypot(point.1) - 1.3).abs() < 0.02, "{point:?}");
        }
        let length: f64 = line.windows(2).map(|p| (p[1].0 - p[0].0).hypot(p[1].1 - p[0].1)).sum();
        assert!((length - std::f64::consts::TAU * 1.3).abs() < 0.05, "{length}");
    }

    #[test]
    fn a_plane_is_exact_on_an_uneven_axis() {
        let (x, y) = (vec![0.0, 0.1, 0.5, 2.0, 7.0], vec![1.0, 2.0, 10.0]);
        let values = table(&x, &y, |x, y| Some(2.0 * x + y));
        let lines = contours(&x, &y, &values, 6.0);
        assert_eq!(lines.len(), 1);
        for point in &lines[0] {
            assert!((2.0 * point.0 + point.1 - 6.0).abs() < 1e-12);
        }
        // From edge to edge of the table: (2.5, 1) to (0, 6).
        let (first, last) = (lines[0][0], lines[0][lines[0].len() - 1]);
        let ends = [first.0.min(last.0), first.0.max(last.0)];
        assert!(ends[0].abs() < 1e-12 && (ends[1] - 2.5).abs() < 1e-12, "{ends:?}");
        assert!(contours(&x, &y, &values, 50.0).is_empty() && contours(&x, &y, &values, -50.0).is_empty());
    }

    #[test]
    fn a_saddle_is_joined_by_its_centre() {
        let at = |values: [f64; 4], level| {
            let [a, b, c, d] = values.map(Some);
            contours(&[0.0, 1.0], &[0.0, 1.0], &[vec![a, b], vec![c, d]], level)
        };
        let on_x = |line: &[Point], x: f64| line.iter().any(|p| (p.0 - x).abs() < 1e-12);
        // The centre is high: the low corners (1, 0) and (0, 1) are cut off.
        let lines = at([3.0, 0.0, 0.0, 3.0], 1.0);
        assert_eq!(lines.len(), 2);
        assert!(lines.iter().all(|line| line.len() == 2 && (on_x(line, 0.0) != on_x(line, 1.0))));
        let above: Vec<_> = lines.iter().map(|line| line.iter().all(|p| p.0 + p.1 > 0.0 && p.1 > p.0)).collect();
        assert_eq!(above.iter().filter(|&&a| a).count(), 1);
        // The centre is low: the high corners (0, 0) and (1, 1) are cut off.
        let lines = at([3.0, 0.0, 0.0, 3.0], 2.0);
        assert_eq!(lines.len(), 2);
        assert!(lines.iter().all(|line| line.iter().all(|p| p.0 + p.1 < 1.0) || line.iter().all(|p| p.0 + p.1 > 1.0)));
    }

    #[test]
    fn missing_corners_leave_triangles_or_gaps() {
        let (x, y) = (axis(0.0, 4.0, 5), axis(0.0, 4.0, 5));
        let height = |x: f64, _: f64| Some(x);
        let holed = table(&x, &y, |x, y| if (x, y) == (2.0, 2.0) { None } else { height(x, y) });
        let lines = contours(&x, &y, &holed, 1.5);
        let points: Vec<_> = lines.iter().flatten().collect();
        assert!(points.iter().all(|p| (p.0 - 1.5).abs() < 1e-12));
        // The line reaches into the cells beside the hole, up to their diagonals.
        assert!(points.iter().any(|p| (p.1 - 1.5).abs() < 1e-12) && points.iter().any(|p| (p.1 - 2.5).abs() < 1e-12));
        assert_eq!(lines.len(), 2);
        let none = table(&x, &y, |x, y| (x != 2.0).then_some(x + y));
        assert!(contours(&x, &y, &none, 4.2).iter().flatten().all(|p| p.0 < 1.0 + 1e-9 || p.0 > 3.0 - 1e-9));
        assert!(contours(&x, &y, &table(&x, &y, |_, _| None), 1.0).is_empty());
    }

    #[test]
    fn a_constant_table_has_no_lines() {
        let (x, y) = (axis(0.0, 1.0, 3), axis(0.0, 1.0, 3));
        for level in [0.0, 1.0, 2.0] {
            assert!(contours(&x, &y, &table(&x, &y, |_, _| Some(1.0)), level).is_empty());
        }
    }
}
