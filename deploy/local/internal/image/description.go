// Package image builds container images without docker and puts them into the cluster's containerd. An image is
// described by a small YAML file (deploy/images), built as an OCI archive whose digest depends on its content alone, and
// imported only when containerd does not have exactly that digest.
package image

import (
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"
)

// Description says what an image consists of.
type Description struct {
	// Name is the full reference that the image is imported as, registry and tag included.
	Name string `json:"name"`
	// Optional makes a failure to build it a warning.
	Optional bool `json:"optional,omitempty"`
	// Packages of the distribution (Debian and its kin) that the image starts from, with what they depend on.
	Packages []string `json:"packages,omitempty"`
	// Exclude drops these paths, and all below them, of the packages.
	Exclude []string `json:"exclude,omitempty"`
	// Files are copied in, Texts written, Directories made, in that order.
	Files       []File      `json:"files,omitempty"`
	Texts       []Text      `json:"texts,omitempty"`
	Directories []Directory `json:"directories,omitempty"`

	// The rest is the image's configuration, with the names and meanings of the OCI image specification.
	User       string   `json:"user,omitempty"`
	WorkingDir string   `json:"workingDir,omitempty"`
	Env        []string `json:"env,omitempty"`
	Entrypoint []string `json:"entrypoint,omitempty"`
	Command    []string `json:"command,omitempty"`
}

// File is one file of the machine that is copied into the image.
type File struct {
	// From is where it is: relative to the directory of built binaries, or absolute.
	From string `json:"from"`
	// To is its absolute path in the image.
	To string `json:"to"`
	// Links are further paths that are symbolic links to it.
	Links []string `json:"links,omitempty"`
	// Applets asks busybox for its applets and links each of them in this directory.
	Applets string `json:"applets,omitempty"`
	// Optional leaves the file out when it does not exist.
	Optional bool `json:"optional,omitempty"`
}

// Text is a file whose content stands in the description.
type Text struct {
	Path    string `json:"path"`
	Content string `json:"content"`
}

// Directory is an empty directory.
type Directory struct {
	Path string `json:"path"`
	// Mode is its permissions in octal, 0755 if empty.
	Mode string `json:"mode,omitempty"`
}

func (d Directory) mode() (int64, error) {
	if d.Mode == "" {
		return 0o755, nil
	}
	return strconv.ParseInt(d.Mode, 8, 32)
}

// Load reads every description (*.yaml) of a directory, in the order of their file names.
func Load(dir string) ([]Description, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil {
		return nil, fmt.Errorf("listing image descriptions: %w", err)
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("listing image descriptions: none in %s", dir)
	}
	var all []Description
	for _, file := range files {
		raw, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("reading an image description: %w", err)
		}
		description, err := Parse(raw)
		if err != nil {
			return nil, fmt.Errorf("reading %s: %w", file, err)
		}
		all = append(all, description)
	}
	return all, nil
}

// Parse reads one description. An unknown field is an error.
func Parse(raw []byte) (Description, error) {
	var d Description
	if err := yaml.UnmarshalStrict(raw, &d); err != nil {
		return d, fmt.Errorf("parsing an image description: %w", err)
	}
	return d, d.validate()
}

// validate returns every problem at once.
func (d Description) validate() error {
	var problems []error
	absolute := func(field, value string) {
		if !path.IsAbs(value) || path.Clean(value) != value {
			problems = append(problems, fmt.Errorf("%s: %q is not a clean absolute path", field, value))
		}
	}
	name, tag, _ := strings.Cut(d.Name, ":")
	if strings.Count(name, "/") < 2 || tag == "" {
		problems = append(problems, fmt.Errorf("name: %q is not of the form registry/repository/image:tag", d.Name))
	}
	for _, file := range d.Files {
		if file.From == "" {
			problems = append(problems, errors.New("files.from: empty"))
		}
		absolute("files.to", file.To)
		for _, link := range file.Links {
			absolute("files.links", link)
		}
		if file.Applets != "" {
			absolute("files.applets", file.Applets)
		}
	}
	for _, text := range d.Texts {
		absolute("texts.path", text.Path)
	}
	for _, directory := range d.Directories {
		absolute("directories.path", directory.Path)
		if _, err := directory.mode(); err != nil {
			problems = append(problems, fmt.Errorf("directories.mode: %q is not octal", directory.Mode))
		}
	}
	return errors.Join(problems...)
}
