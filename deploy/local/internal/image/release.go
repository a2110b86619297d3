package image

import (
	"context"
	"path/filepath"
	"slices"
)

// Released reports whether everything in an image comes from the directory of built binaries. The others, which have parts of this
// machine's distribution, are for demonstrations.
func (d Description) Released() bool {
	return len(d.Packages) == 0 && len(d.Files) > 0 && !slices.ContainsFunc(d.Files, func(f File) bool { return filepath.IsAbs(f.From) })
}

// Digests builds the images that are released, and returns their digests by their names. Binaries that are optional while one develops are
// required here.
func (b Builder) Digests(ctx context.Context, descriptions []Description) (map[string]string, error) {
	out := make(map[string]string)
	for _, d := range descriptions {
		if !d.Released() {
			continue
		}
		d.Files = slices.Clone(d.Files)
		for i := range d.Files {
			d.Files[i].Optional = false
		}
		built, err := b.Build(ctx, d)
		if err != nil {
			return nil, err
		}
		out[d.Name] = built.Digest.String()
	}
	return out, nil
}
