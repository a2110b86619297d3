package cluster

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	yamlutil "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"
)

// digestAnnotation notes, in a Pod template, which content its images have. All of our images keep their tag, so without
// it a template would not change with its image, and nothing would be rolled out.
const digestAnnotation = "local.fast-sandbox.io/image-digests"

// noteDigests adds the annotation to every Pod template that uses one of the images.
func noteDigests(manifests string, digests map[string]string) (string, error) {
	decoder := yamlutil.NewYAMLToJSONDecoder(strings.NewReader(manifests))
	var out strings.Builder
	for {
		var object map[string]any
		err := decoder.Decode(&object)
		if errors.Is(err, io.EOF) {
			return out.String(), nil
		}
		if err != nil {
			return "", fmt.Errorf("reading the manifests: %w", err)
		}
		if len(object) == 0 {
			continue
		}
		if err := annotate(object, digests); err != nil {
			return "", err
		}
		raw, err := yaml.Marshal(object)
		if err != nil {
			return "", fmt.Errorf("writing the manifests: %w", err)
		}
		out.WriteString("---\n")
		out.Write(raw)
	}
}

// annotate handles the templates of Deployments, DaemonSets and the like, and that of a SandboxPool.
func annotate(object map[string]any, digests map[string]string) error {
	for _, field := range []string{"template", "agentTemplate"} {
		template, found, err := unstructured.NestedMap(object, "spec", field)
		if err != nil || !found {
			continue
		}
		used := usedDigests(template, digests)
		if len(used) == 0 {
			continue
		}
		err = unstructured.SetNestedField(object, strings.Join(used, " "), "spec", field, "metadata", "annotations", digestAnnotation)
		if err != nil {
			return fmt.Errorf("annotating a Pod template: %w", err)
		}
	}
	return nil
}

func usedDigests(template map[string]any, digests map[string]string) []string {
	var used []string
	for _, kind := range []string{"initContainers", "containers"} {
		containers, _, _ := unstructured.NestedSlice(template, "spec", kind)
		for _, container := range containers {
			fields, _ := container.(map[string]any)
			name, _ := fields["image"].(string)
			if digest, ok := digests[normalize(name)]; ok {
				used = append(used, digest)
			}
		}
	}
	slices.Sort(used)
	return slices.Compact(used)
}

// normalize completes a short image name as containerd does: the default registry in front.
func normalize(name string) string {
	first, _, hasPath := strings.Cut(name, "/")
	switch {
	case !hasPath:
		name = "docker.io/library/" + name
	case !strings.ContainsAny(first, ".:") && first != "localhost":
		name = "docker.io/" + name
	}
	if last := name[strings.LastIndex(name, "/"):]; !strings.ContainsAny(last, ":@") {
		name += ":latest"
	}
	return name
}
