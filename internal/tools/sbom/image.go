package main

import (
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/spdx/tools-golang/spdx"
	"github.com/spdx/tools-golang/spdx/v2/common"
	"sigs.k8s.io/yaml"
)

// description is what this command reads of the description of an image (deploy/images).
type description struct {
	Name  string `json:"name"`
	Files []struct {
		From string `json:"from"`
	} `json:"files"`
}

// short returns the last part of the name, without the tag.
func (d description) short() string {
	name, _, _ := strings.Cut(path.Base(d.Name), ":")
	return name
}

func readDescriptions(dir string) ([]description, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil {
		return nil, err
	}
	var out []description
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		var d description
		if err := yaml.Unmarshal(raw, &d); err != nil {
			return nil, fmt.Errorf("reading %s: %w", file, err)
		}
		out = append(out, d)
	}
	return out, nil
}

// imageDocument returns the document of an image that has binaries, and nothing else.
func imageDocument(i description, digest, created string, programs map[string]program) (document, error) {
	sum, ok := strings.CutPrefix(digest, "sha256:")
	if !ok {
		return document{}, fmt.Errorf("the digest %q is not one of SHA-256", digest)
	}
	d := newDocument("image-"+i.short(), sum, created)
	name, tag, _ := strings.Cut(i.Name, ":")
	id := d.add(&spdx.Package{
		PackageName: name, PackageSPDXIdentifier: elementID("image", i.short(), sum), PackageVersion: tag, PrimaryPackagePurpose: "CONTAINER",
		PackageLicenseDeclared: license, PackageChecksums: []common.Checksum{{Algorithm: common.SHA256, Value: sum}},
		PackageExternalReferences: purl("oci", i.short(), digest),
	})
	d.describe(id)
	if len(i.Files) == 0 {
		return document{}, errors.New("it has no files")
	}
	for _, f := range i.Files {
		p, ok := programs[f.From]
		if !ok {
			return document{}, fmt.Errorf("the binary %s is not among those given", f.From)
		}
		d.relate(id, common.TypeRelationshipContains, d.program(p))
	}
	return d, nil
}
