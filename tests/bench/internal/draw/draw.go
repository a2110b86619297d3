// Package draw draws a report's figure as SVG. It is stateless.
package draw

import (
	"bytes"
	"fmt"
	"image/color"
	"io"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"github.com/fast-sandbox/fast-sandbox/tests/bench/internal/report"
)

const (
	width  = 18 * vg.Centimeter
	height = 10 * vg.Centimeter
)

// paletteColor returns the i-th color of a palette that color-blind readers can distinguish (Okabe and Ito).
func paletteColor(i int) color.Color {
	palette := []color.Color{
		color.RGBA{0x00, 0x72, 0xb2, 0xff}, color.RGBA{0xd5, 0x5e, 0x00, 0xff}, color.RGBA{0x00, 0x9e, 0x73, 0xff},
		color.RGBA{0xcc, 0x79, 0xa7, 0xff}, color.RGBA{0xe6, 0x9f, 0x00, 0xff}, color.RGBA{0x56, 0xb4, 0xe9, 0xff},
	}
	return palette[i%len(palette)]
}

// SVG writes the figure as SVG.
func SVG(w io.Writer, f report.Figure) error {
	p := plot.New()
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = f.Title, f.X, f.Y
	p.Title.Padding = 2 * vg.Millimeter
	// Where the lines of these figures leave room: on a logarithmic axis, and beside bars, that is made.
	p.Legend.Top, p.Legend.Left = f.LogX || len(f.Bars) > 0, f.LogX || len(f.Bars) > 0
	p.Legend.Padding = vg.Millimeter
	p.Add(plotter.NewGrid())
	var err error
	if len(f.Bars) > 0 {
		err = bars(p, f)
	} else {
		err = lines(p, f)
	}
	if err != nil {
		return fmt.Errorf("drawing %q: %w", f.Title, err)
	}
	canvas := vgsvg.New(width, height)
	p.Draw(draw.New(canvas))
	if _, err := canvas.WriteTo(w); err != nil {
		return fmt.Errorf("drawing %q: %w", f.Title, err)
	}
	return nil
}

func lines(p *plot.Plot, f report.Figure) error {
	n := 0
	for i, l := range f.Lines {
		var points plotter.XYs
		for _, x := range l.Points {
			if (!f.LogX || x[0] > 0) && (!f.LogY || x[1] > 0) { // a logarithmic axis cannot show the others
				points = append(points, plotter.XY{X: x[0], Y: x[1]})
			}
		}
		if len(points) == 0 {
			continue
		}
		n += len(points)
		line, dots, err := plotter.NewLinePoints(points)
		if err != nil {
			return err
		}
		line.Color, line.Width = paletteColor(i), vg.Points(1.4)
		dots.Color, dots.Shape, dots.Radius = line.Color, draw.CircleGlyph{}, vg.Points(1.3)
		p.Add(line, dots)
		p.Legend.Add(l.Name, line)
	}
	if n == 0 {
		return fmt.Errorf("there is nothing to draw")
	}
	if f.LogX {
		p.X.Scale, p.X.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
		p.X.Min, p.X.Max = apart(p.X.Min, p.X.Max)
		p.X.Min /= 4 // room for the legend
	}
	if f.LogY {
		p.Y.Scale, p.Y.Tick.Marker = plot.LogScale{}, plot.LogTicks{Prec: -1}
		p.Y.Min, p.Y.Max = apart(p.Y.Min, p.Y.Max)
	} else {
		p.Y.Min = min(p.Y.Min, 0)
	}
	return nil
}

// apart widens a range of a single value, which a logarithmic axis cannot show.
func apart(low, high float64) (float64, float64) {
	if low == high {
		return low / 2, high * 2
	}
	return low, high
}

func bars(p *plot.Plot, f report.Figure) error {
	var below *plotter.BarChart
	for i, b := range f.Bars {
		chart, err := plotter.NewBarChart(plotter.Values(b.Values), vg.Points(34))
		if err != nil {
			return err
		}
		chart.Color, chart.LineStyle.Width = paletteColor(i), 0
		if below != nil {
			chart.StackOn(below)
		}
		below = chart
		p.Add(chart)
		p.Legend.Add(b.Name, chart)
	}
	p.NominalX(f.Groups...)
	p.X.Min, p.X.Max = -0.6, float64(len(f.Groups))-0.4 // whole bars
	p.Y.Min, p.Y.Max = 0, p.Y.Max*1.25
	return nil
}

// Bytes is SVG into memory.
func Bytes(f report.Figure) ([]byte, error) {
	var b bytes.Buffer
	err := SVG(&b, f)
	return b.Bytes(), err
}
